# Your own sampler: it prefers the clients that moved the model most, and stays unbiased.
import rota


class Movers:
    sees = ("norm",)  # all that it learns about single clients

    def init(self, shares, rounds):  # shares[s, i]: how much of model s's data client i has
        return {"score": shares}

    def draw(self, state, shares, generator):
        p = 5 * state["score"] / state["score"].sum()
        return rota.sampling.draw.independent(p.clip(0.1, 1) * (shares > 0), shares, generator)

    def observe(self, state, shares, plan, seen):  # the score is share * norm of the update
        score, drawn = state["score"].copy(), (plan.model[seen.ok], plan.client[seen.ok])
        score[drawn] = shares[drawn] * seen.norm[seen.ok]
        return {"score": score}


run = rota.run([rota.Task(rota.models.two_nn, rota.data.digits())], Movers(), rounds=30)
print(run.summary["accuracy"])
