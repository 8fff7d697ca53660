"""Algorithm 1 of "Differentially Private Learning with Adaptive Clipping" (Andrew et al., 2021) in plain NumPy.

Nothing is imported from clipline, whose tests use this file as reference. `python examples/algorithm1.py` trains a
small classifier and prints how the clip finds the median by itself.
"""

import math

import numpy as np


def algorithm1(
    params,  # (dim,) the initial model
    data,  # data[user] = (x, y), the examples of one user
    gradient,  # gradient(params, x, y) -> (dim,)
    *,
    rounds,
    cohort_size,  # m: declared, and the divisor whatever the realised cohort is
    draw_cohort,  # draw_cohort(t) -> the users of round t
    draw_order,  # draw_order(t, user, count) -> a permutation of the user's examples
    draw_noise,  # draw_noise(t) -> (dim + 1,) standard normal numbers: the update's, then the bit's
    noise_multiplier,  # z of the whole round
    count_stddev,  # sigma_b, in users
    quantile=0.5,
    clip=0.1,
    clip_lr=0.2,
    rule="geometric",
    client_lr=0.1,
    batch_size=20,
    server_lr=1.0,
    server_momentum=0.9,
):
    """Return the trained parameters and, for each round, (clip that clipped, noisy fraction within)."""
    delta_noise_multiplier = split_noise(noise_multiplier, count_stddev)
    momentum = np.zeros_like(params)
    history = []
    for t in range(rounds):
        total, total_bits = np.zeros_like(params), 0.0
        for user in draw_cohort(t):
            delta, within = fed_avg(params, data[user], gradient, draw_order, t, user, client_lr, batch_size, clip)
            total += delta
            total_bits += within - 0.5  # centred: a user who joins or leaves moves the sum by 1/2 at most
        noise = draw_noise(t)
        mean = noisy(total, delta_noise_multiplier * clip, noise[:-1]) / cohort_size
        fraction_within = noisy(total_bits, count_stddev, noise[-1]) / cohort_size + 0.5
        momentum = server_momentum * momentum + mean
        params = params + server_lr * momentum
        history.append((clip, fraction_within))
        clip = next_clip(clip, fraction_within, quantile, clip_lr, rule)
    return params, history


def fed_avg(params, examples, gradient, draw_order, t, user, client_lr, batch_size, clip):
    """One user's visit: local SGD over shuffled batches, then the clipped update and the bit."""
    x, y = examples
    order = draw_order(t, user, len(y))
    local = params.copy()
    for start in range(0, len(y), batch_size):
        batch = order[start : start + batch_size]
        local -= client_lr * gradient(local, x[batch], y[batch])
    delta = local - params
    norm = np.linalg.norm(delta)
    if not np.isfinite(norm):
        return np.zeros_like(params), 0.0
    within = float(norm <= clip)
    return (delta if within else delta * (clip / norm)), within


def noisy(total, stddev, noise):
    """Noise, then multiples of a power of two near 2^-20 stddev: low bits would tell what the noise was added to."""
    grid = 2.0 ** (math.floor(math.log2(stddev)) - 20) if stddev > 0 else 0.0
    return np.round((total + stddev * noise) / grid) * grid if stddev > 0 else total


def split_noise(noise_multiplier, count_stddev):
    """Theorem 1: the multiplier on the updates that leaves room for the noisy count."""
    return (noise_multiplier**-2 - (2 * count_stddev) ** -2) ** -0.5 if noise_multiplier > 0 else 0.0


def next_clip(clip, fraction_within, quantile, clip_lr, rule):
    """Up when too few updates are within the clip, down when too many."""
    step = clip_lr * (fraction_within - quantile)
    if rule == "geometric":
        return clip * math.exp(-step)
    return max(clip - step, clip / 2)  # the paper's linear rule, kept from passing zero


def softmax_gradient(params, x, y, classes):
    """Gradient of the mean cross-entropy of a linear classifier; params is (features * classes,)."""
    logits = x @ params.reshape(x.shape[1], classes)
    odds = np.exp(logits - logits.max(axis=1, keepdims=True))
    odds /= odds.sum(axis=1, keepdims=True)
    odds[np.arange(len(y)), y] -= 1
    return (x.T @ odds / len(y)).ravel()


def main(users=2000, features=10, classes=4, rounds=120, cohort_size=100):
    """Train on invented users: the clip starts at 0.001 and nobody tells it where to go."""
    rng = np.random.default_rng(0)
    truth = rng.normal(size=(features, classes))
    inputs = [rng.normal(size=(rng.integers(5, 40), features)) for _ in range(users)]
    data = [(x, (x @ truth).argmax(axis=1)) for x in inputs]
    params, history = algorithm1(
        np.zeros(features * classes), data, lambda params, x, y: softmax_gradient(params, x, y, classes),
        rounds=rounds, cohort_size=cohort_size,
        draw_cohort=lambda t: rng.choice(users, cohort_size, replace=False),
        draw_order=lambda t, user, count: rng.permutation(count),
        draw_noise=lambda t: rng.normal(size=features * classes + 1),
        noise_multiplier=1.0, count_stddev=cohort_size / 20, clip=0.001,
    )  # fmt: skip
    for t in range(0, rounds, 10):
        print(f"round {t:3d}   clip {history[t][0]:.4f}   fraction within {history[t][1]:+.2f}")
    x = rng.normal(size=(5000, features))
    right = ((x @ params.reshape(features, classes)).argmax(axis=1) == (x @ truth).argmax(axis=1)).mean()
    print(f"accuracy on new examples {right:.3f}")


if __name__ == "__main__":
    main()
