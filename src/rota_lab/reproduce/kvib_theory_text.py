"""The prose of the page on K-Vib's theory."""

from __future__ import annotations

WARNING = """\
**This is a quick version, with few rounds and seeds. It shows that the reproduction runs, and is
not the result.**

"""

INTRODUCTION = """\
K-Vib's theory, measured: its sampler and other unbiased ones on its Synthetic data, and its
theorems. The measure is the variance of the estimate of a round's full update (eq. 2), added up
over the rounds. rota's own sampler, `succession`, is compared with all of them. The paper shows
figures and gives no values.
"""

MEASURED = """\
## How it was measured
The data are `synthetic-kvib`, with logistic regression, mini-batches of 64, one local epoch, server
step 1, {logits_rounds} rounds, and {budget} clients per round. All clients train in every round,
apart from the run, so that the measures are exact for the probabilities that were applied:

- **variance** (eq. 2): E|estimate - D|^2, by the formula of the sampler's own procedure. It
  compares the samplers, so it comes first. `cumulative` is its sum over the rounds, and `late` is
  the sum over the second half of them. Two procedures have no cheap formula, and their variance is
  a mean over draws per round: {sequential} draws for those without replacement, and {systematic}
  for systematic ones ({many} on other federations).
- **relative regret**: the mean over the rounds of |l(p) - min l| / min l, with l(p) = sum pi^2 / p,
  pi_i = d_i |g_i|, and the minimum over 0 < p <= 1, sum p = K (Lemma 3). K-Vib's published code
  accumulates such a quotient.
- **regret** (eq. 6): the sum of l(p) - min l. It is no variance up to a constant: coins have the
  variance l(p) - sum pi^2, and draws with replacement have l(K q) - |D|^2 / K. Their p = K q may
  exceed 1, so their regret may be negative.

There are two settings. On **logits**, the learning rate is {logits_rate}: see the sweep below.
K-Vib's published code applies **softmax twice**, with learning rate {twice_rate}. Each
comparison is made twice: on each run's **own updates**, which is what a user gets, because a noisy
sampler also causes larger updates; and on **shared updates**, which one run with full participation
recorded, so that only the samplers differ.

All samplers have the same seeds, mini-batches and start. There are {logits_seeds} of {planned}
planned seeds on logits, of which the first {wide} have all budgets, procedures, starts and bounds
on shared updates, and {twice_seeds} with softmax twice. Other budgets on own updates have
{budgets_seeds} seeds on logits and {budgets_twice_seeds} with softmax twice; systematic draws have
{systematic_seeds} and {systematic_twice_seeds}; the sweep has {sweep_seeds}. The other federations
have {other_rounds} rounds, and the made-up updates have {made_rounds}. Both have {draws} draws of
each sampler on one sequence. These parts are smaller to save time; all finished parts took
{minutes} minutes on a busy machine. Intervals are 95 % intervals over the seeds. Those of positive
quantities are intervals of geometric means, so they do not reach below 0.
"""

PROCEDURE = """\
Every learner draws by every procedure, so that a gain of the learner and a gain of the procedure
can be told apart. "fixed size" is only defined for uniform probabilities. K-Vib is its rule on
coins; its rule with replacement, and Vrb's and Avare's rules on coins, are our addition. Coins "in
proportion to the data" learn nothing: p is proportional to d, which the server knows.

"""

READINGS = """\
K-Vib's Figure 7 says that its rivals' regret rises with the budget. Vrb, Mabs and Avare draw K
times with replacement, by q. As in its paper, their p is K q. Then l(K q) = l(q) / K, and their
regret falls with K by itself. It can only rise if q stands for p, as the paper's words suggest.
Both readings are below.

"""

SWEEP = """\
The learning rate of K-Vib's setting belongs to a network that applies softmax twice. On logits its
gradients are larger. The table has the test loss after {sweep_rounds} rounds at K = {budget}, the
smallest budget, where the noise is largest: the geometric mean over {sweep_seeds} seeds, their
least loss and their largest. A rate is too high for a sampler where its loss is clearly above that
of full participation. The page's rate is a compromise between the samplers, as their best rates
differ.

"""

AVARE = """\
Avare draws by the last known norms, and its source does not say what a client counts for that was
never seen. The three choices on shared updates, as cumulative variances and divided by K-Vib's. A
first pass asks every client to train once, which costs as much as ten rounds at this budget; its
cost is not counted here.

"""

BOUND = """\
K-Vib and Vrb both need G, a bound on the scores pi, for gamma = G^2 N / (theta K), with K = 1 for
Vrb. The first table gives both the same G, on shared updates. "learnt" replaces G^2 by the mean
square of the scores so far ([K-Vib's numbers](../samplers.md#k-vibs-numbers)). The second table has
K-Vib's sensitivity study: theta is fixed, and G is varied.

"""

THEOREMS = """\
**Equation 7** splits the regret: the static regret is the distance from the sampler's sum of l(p)
to that of the best fixed p, and the hindsight gap is the distance from there to the sum of the
least l. Theorem 6 says that the gap vanishes per round. The first table is on shared updates on
logits, K-Vib without a G.

**Theorem 8** bounds K-Vib's static regret by a multiple of G^2 N^(1/3) T^(2/3) / K^(4/3), up to
logarithms. The second table has the exponents that were measured: least-squares slopes of
logarithms over several draws on one recorded sequence of Synthetic(0, 0), with G = the largest
score of the sequence. An interval covers the randomness of the draws, and not that of the data. A
bound is kept where the measured exponent is at most the theorem's. For N, the data differ with N. A
larger exponent over this range does not refute an upper bound, which has a constant; it says that
the bound does not describe the growth here.

**Lemma 2** calls coins the optimal procedure, because their bound (eq. 4) is below that of cohorts
of a fixed size (eq. 3). The third table has eq. 3's bound beside the exact variances of both
procedures, for uniform probabilities on shared updates. Eq. 4 is exact.

"""

TERMS_TEXT = """\
**Theorem 13** adds up what a step gains and loses. By the descent lemma,
E f(x - d) <= f(x) - (grad f, D) + L / 2 (|D|^2 + variance), and only the variance depends on the
sampler. L is half the largest eigenvalue of the inputs' second moment. The table has the means of
the terms over the rounds that were looked at (one in 25), and the fall of the training loss per
round.

"""

FIGURE_6 = """\
The part of all training examples that the clients with most data hold. K-Vib's paper says that the
writers v1, v2 and v3 have 10 %, 20 % and 50 % of the clients with 82 %, 90 % and 98 % of the
images. Its images are Federated EMNIST's, and ours are MNIST's.

"""

OURS_TEXT = """\
`succession` ([succession.py](../../src/rota/sampling/adaptive/succession.py)) draws with
p = waterfill(d_i a_i, K), and a_i^2 = (m^2 + n s^2) / (n + 1) for a client with n norms. s^2 is
their mean square, in which the newest counts as much as all older ones together, so old rounds are
forgotten. m^2 is the mean of s^2 over the clients that were seen: by the rule of succession, a
client is as any other until its own norms say otherwise. Nothing is tuned, and every p is known
before the draw, so the estimate is unbiased. The file derives what the start costs, and what it
costs when a client changes.

The draw is systematic: a cohort of fixed size with these p. On Fashion shards, whose clients are
alike, even the best coins (`optimal`) are hardly below uniform sampling of a fixed size: the second
table shows it. On made-up updates, which have no directions, it draws coins.

Its first round is in proportion to the data: unlike K-Vib, Vrb and Avare, it makes use of d before
anything is learnt. The rows of `proportional` show what that alone is worth. It was chosen with
seed 100 of Synthetic, and with the sequences of updates below of three other federations
(writers-v3, digits and fashion) and of the made-up ones. So writers-v1 and writers-v2 are the
better test.

Its rivals are the unbiased samplers that know no more than it does: the shares d, and norms of the
clients that were drawn. In the claims it has to beat the best of them in each seed, which is harder
than to beat each of them. "best rival" is the one with the least mean.

"""

DIFFERENCES = """\
## What differs from the source
- **Loss.** K-Vib's network ends in a softmax, and its loss applies another. "softmax twice" does
  the same; "logits" does not, and has its own learning rate.
- **Regret.** Its code accumulates |sum over the drawn of a / p - optimum| / optimum with a in place
  of a^2. Here l is that of eq. 6, for the probabilities that were applied.
- **Variance.** Its code takes the difference of two norms. Here it is the exact variance of eq. 2.
- **K-Vib.** Its code leaves out the square root of Lemma 7. Here p follows the paper. The text has
  lost the values of G, so here G is learnt, or it is given by one rule for K-Vib and Vrb.
- **Vrb** has theta = (N / T)^(1/3), and the same learnt G.
- **Mabs** needs a scale, which the sources guess. Here it is the mean square of the first cohort's
  scores.
- **Avare.** No code is public. The floor is our reading of its appendix, and the start of clients
  that were never seen is our choice; all three choices are above.
- **OSMD**, clustered sampling by size, sampling in proportion to the data, and all procedures
  other than the sources' are our addition.
- **Uniform** draws a cohort of a fixed size and is unbiased, as in its Algorithm 1.
- **Repetition.** The paper shows the standard deviation over five runs.
"""
