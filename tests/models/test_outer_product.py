"""States by the compiled kernel: what the formulas give, and one arithmetic however they came."""

import pytest
import torch

from outrider.models.cpu_kernels import build, outer_product

pytestmark = pytest.mark.skipif(build.unbuilt() is not None, reason=f"{build.unbuilt()}")
ROWS, NODES, HEADS, GROUPS, KEYS, VALUES = 2, 6, 4, 2, 48, 80
#: A tree: two nodes behind the row's state, then children; another one in the second row.
ORIGINS = torch.tensor([[0, 1, 1, 2, 4, 0], [0, 1, 2, 3, 3, 5]])


def tables(by_channel, seed=0):
    random = torch.Generator().manual_seed(seed)
    state = torch.randn(ROWS, HEADS, KEYS, VALUES, generator=random)
    query, key = torch.randn(2, ROWS, NODES, GROUPS, KEYS, generator=random)
    value = torch.randn(ROWS, NODES, HEADS, VALUES, generator=random)
    beta = torch.rand(ROWS, NODES, HEADS, generator=random)
    decay = torch.rand(ROWS, NODES, HEADS, *[KEYS] * by_channel, generator=random)
    return state, query / KEYS, key / KEYS**0.5, value, beta, decay


def empty_log(decay, key, value, ring=16):
    return tuple(torch.zeros(len(x), ring, *x.shape[2:]) for x in (decay, key, value))


def over(state, origins, q, k, v, beta, decay, log=None, due=None, first=0):
    """Outputs and deltas; the nodes' entries stand in the log from place `first` on."""
    log = empty_log(decay, k, v) if log is None else log
    lines = (torch.arange(first, first + q.shape[1]) % log[0].shape[1]).expand(len(state), -1)
    zero = torch.zeros(len(state), dtype=torch.int64)
    due = (zero, zero) if due is None else due
    out = outer_product.over_nodes(state, origins, q, k, v, beta, decay, log, lines, due)
    decays, keys, deltas = (table.gather(1, _wide(lines, table)) for table in log)
    assert torch.equal(decays, decay)
    assert torch.equal(keys, k)
    return out, deltas


def _wide(lines, table):
    return lines.view(*lines.shape, *[1] * (table.dim() - 2)).expand(-1, -1, *table.shape[2:])


@pytest.mark.parametrize("corrects", [False, True])
@pytest.mark.parametrize("by_channel", [False, True])
def test_nodes_of_trees_are_what_the_formulas_give(by_channel, corrects):
    state, q, k, v, beta, decay = tables(by_channel)
    share = beta if corrects else None
    out, delta = over(state, ORIGINS, q, k, v, share, decay)
    wide_q, wide_k = (x.repeat_interleave(HEADS // GROUPS, 2).double() for x in (q, k))
    for row in range(ROWS):
        states = [state[row].double()]
        for node in range(NODES):
            left = decay[row, node].double()
            before = states[ORIGINS[row, node]] * (
                left[..., None] if by_channel else left[:, None, None]
            )
            new = v[row, node].double()
            if corrects:
                known = torch.einsum("hk,hkv->hv", wide_k[row, node], before)
                new = (new - known) * beta[row, node, :, None]
            states.append(before + wide_k[row, node][..., None] * new[:, None])
            seen = torch.einsum("hk,hkv->hv", wide_q[row, node], states[-1])
            assert torch.allclose(delta[row, node].double(), new, atol=1e-5)
            assert torch.allclose(out[row, node].double(), seen, atol=1e-5)


@pytest.mark.parametrize("corrects", [False, True])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("by_channel", [False, True])
def test_a_text_has_the_same_bits_in_one_call_and_node_by_node(by_channel, threads, corrects):
    state, q, k, v, beta, decay = tables(by_channel)
    share = beta if corrects else None
    chain = torch.arange(NODES).expand(ROWS, -1)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole, deltas = over(state, chain, q, k, v, share, decay)
        now, zero = state.clone(), torch.zeros(ROWS, dtype=torch.int64)
        for node in range(NODES):
            at = slice(node, node + 1)
            own = None if share is None else share[:, at]
            each = (q[:, at], k[:, at], v[:, at], own, decay[:, at])
            one, delta = over(now, zero[:, None], *each)
            assert torch.equal(one, whole[:, at])
            assert torch.equal(delta, deltas[:, at])
            log = decay[:, at], k[:, at], delta
            outer_product.advance(now, now, log, zero, zero + 1)
        together = torch.empty_like(state)
        outer_product.advance(state, together, (decay, k, deltas), zero, zero + NODES)
        assert torch.equal(together, now)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("corrects", [False, True])
@pytest.mark.parametrize("origins", [ORIGINS[:1], torch.arange(NODES)[None]], ids=["tree", "chain"])
@pytest.mark.parametrize("count", [1, 3, 4, NODES])
def test_what_is_due_is_applied_ahead_of_the_nodes_bit_for_bit(origins, count, corrects):
    """Rows of unequal counts around a ring, trees and chains of every length that is unrolled."""
    state, q, k, v, beta, decay = tables(False)
    origins = origins[:, :count].expand(ROWS, -1).contiguous()
    few = [x[:, :count] for x in (q, k, v, beta, decay)]
    few[3] = few[3] if corrects else None
    log = empty_log(decay, k, v)
    for table, entries in zip(log, (decay, k, v), strict=True):
        table[:, [14, 15, 0]] = entries[:, :3]
    first, counts = torch.tensor([14, 15]), torch.tensor([3, 0])
    behind = torch.empty_like(state)
    outer_product.advance(state, behind, log, first, counts)
    expected = over(behind, origins, *few)
    now = state.clone()
    found = over(now, origins, *few, log=log, due=(first, counts), first=3)
    assert torch.equal(now, behind)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_rows_advance_by_their_own_counts_around_the_ring():
    state, _, k, v, _, decay = tables(False)
    log, first = (decay, k, v), torch.tensor([4, 1])
    made = torch.empty_like(state)
    outer_product.advance(state, made, log, first, torch.tensor([3, 0]))
    assert torch.equal(made[1], state[1])
    turned = tuple(table[:1].roll(2, 1) for table in log)  # places 4, 5, 0 become 0, 1, 2
    again, zero = torch.empty_like(state[:1]), torch.zeros(1, dtype=torch.int64)
    outer_product.advance(state[:1], again, turned, zero, zero + 3)
    assert torch.equal(again[0], made[0])


def test_other_shapes_are_left_to_torch():
    assert outer_product.unsupported_reason(torch.zeros(1, 1, 16, 32)) is None
    for state in (torch.zeros(1, 1, 8, 16), torch.zeros(1, 1, 272, 16)):
        assert "alone" in outer_product.unsupported_reason(state)
    assert "float32" in outer_product.unsupported_reason(torch.zeros(1, 1, 16, 16).double())
