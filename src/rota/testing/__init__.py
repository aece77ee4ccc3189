"""The suites that rota's own samplers, estimators, channels and engines pass, for yours.

    import rota.testing

    def test_my_sampler() -> None:
        rota.testing.check_sampler(MySampler(budget=3))

Every check is a plain assertion with a sentence that says what is wrong.
"""

from rota.testing.channels import check_channel
from rota.testing.engines import check_engine
from rota.testing.estimators import check_estimator
from rota.testing.samplers import check_sampler

__all__ = ["check_channel", "check_engine", "check_estimator", "check_sampler"]
