"""Tokens per target call, time and memory, from an acceptance probability.

alpha is the acceptance of one drafted token, taken as independent and equal at every position.
Real ones are positively correlated, which alone would make `expected_tokens` too low; that calls
gather where little is accepted makes it too high (docs/theory.md). gamma is the number of drafted
tokens, c the time of one draft step over the time of one target step.

>>> round(expected_tokens(0.8, 5), 2), round(speedup(0.8, 5, 0.0), 2), best_length(0.8, 0.05)
(3.69, 3.69, 8)
"""


def _check(alpha: float, gamma: int = 0) -> None:
    if not 0 <= alpha <= 1 or gamma < 0:
        raise ValueError(f"need 0 <= alpha <= 1 and gamma >= 0; got {alpha!r} and {gamma!r}")


def expected_tokens(alpha: float, gamma: int) -> float:
    """E = (1 - a^(g+1)) / (1 - a) = sum of a^i for i <= g: accepted tokens and one more."""
    _check(alpha, gamma)
    return float(gamma + 1) if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)


def speedup(alpha: float, gamma: int, cost: float) -> float:
    """Wall-time improvement E / (g c + 1): verifying g + 1 tokens costs one step, no overhead."""
    return expected_tokens(alpha, gamma) / (gamma * cost + 1)


def best_length(alpha: float, cost: float, most: int = 1000) -> int:
    """The gamma of the largest speedup: the first g with a^(g+1) (1 + c g) <= c E(g)."""
    _check(alpha)
    tokens, power = 1.0, alpha
    for gamma in range(most):
        if power * (1 + cost * gamma) <= cost * tokens:
            return gamma
        tokens, power = tokens + power, power * alpha
    return most


def operations(alpha: float, gamma: int, cost: float = 0.0) -> float:
    """Arithmetic compared with plain decoding: (g c^ + g + 1) / E, c^ the ratio of operations."""
    return (gamma * cost + gamma + 1) / expected_tokens(alpha, gamma)


def memory_bound_speedup(tokens: float, gamma: int, ratio: float) -> float:
    """MBSU = tokens / (g r + 1) with r = size of the draft / size of the target.

    Run time proportional to bytes read. (The printed ratio in RSD's appendix is upside down.)
    """
    return tokens / (gamma * ratio + 1)


def draft_acceptance_rate(alpha: float, gamma: int) -> float:
    """Accepted / drafted = a (1 - a^g) / (g (1 - a)), as servers report it; not alpha."""
    _check(alpha, gamma)
    return (expected_tokens(alpha, gamma) - 1) / gamma if gamma else float("nan")
