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


@pytest.mark.parametrize("corrects", [False, True])
@pytest.mark.parametrize("by_channel", [False, True])
def test_nodes_of_trees_are_what_the_formulas_give(by_channel, corrects):
    state, q, k, v, beta, decay = tables(by_channel)
    share = beta if corrects else None
    out, delta = outer_product.over_nodes(state, ORIGINS, q, k, v, share, decay)
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


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("by_channel", [False, True])
def test_a_text_has_the_same_bits_in_one_call_and_node_by_node(by_channel, threads):
    state, q, k, v, beta, decay = tables(by_channel)
    chain = torch.arange(NODES).expand(ROWS, -1)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole, deltas = outer_product.over_nodes(state, chain, q, k, v, beta, decay)
        now, zero = state.clone(), torch.zeros(ROWS, dtype=torch.int64)
        for node in range(NODES):
            at = slice(node, node + 1)
            each = (x[:, at] for x in (q, k, v, beta, decay))
            one, delta = outer_product.over_nodes(now, zero[:, None], *each)
            assert torch.equal(one, whole[:, at])
            assert torch.equal(delta, deltas[:, at])
            log = decay[:, at], k[:, at], delta
            outer_product.advance(now, now, log, zero, zero + 1)
        together = torch.empty_like(state)
        outer_product.advance(state, together, (decay, k, deltas), zero, zero + NODES)
        assert torch.equal(together, now)
    finally:
        torch.set_num_threads(before)


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
