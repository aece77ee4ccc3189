"""How many rows go into one stack.

Both answers depend on the task and the machine alone, never on a timing: rows of another stack size round differently in their last
bits, and a run that is resumed must repeat them.
"""

from __future__ import annotations

import torch

from rota.engine.stack import Stack, Steps

PARAMETERS = 1 << 20


def rows_for_a_core(steps: Steps) -> int:
    """On a CPU: as many rows as hold about a million parameters together.

    Small networks are bound by the calls of operators, which a stack shares; large ones by the cache, which a stack overflows.
    """
    return max(1, min(256, PARAMETERS // max(1, steps.params.numel)))


def rows_of_results(steps: Steps, workers: int) -> int:
    """With the C library: as many rows as have about 256 MB of results, and enough to keep all cores busy."""
    return max(8 * workers, (256 << 20) // max(1, steps.params.numel * steps.dtype.itemsize))


def rows_that_fit(steps: Steps, width: int) -> int:
    """On a GPU: the power of two of rows that fits well into its free memory, from what a step of two rows takes."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    stack = Stack(steps, 2, width, steps.plain)
    index = steps.some(width).expand(2, -1)
    stack.advance(
        2,
        steps.x[index],
        steps.y[index],
        torch.zeros(2, width, dtype=steps.dtype, device=steps.x.device),
    )
    torch.cuda.synchronize()
    each = max(1, (torch.cuda.max_memory_allocated() - before) // 2)
    free, _ = torch.cuda.mem_get_info()
    return 1 << max(0, int(0.6 * free / each).bit_length() - 1)
