"""The paper's verification (Wagner et al. 2024), with the signature that transformers calls.

One pass per drafted row writes tau(x) and a(x) for the whole vocabulary and b = sum a, then PyTorch
reads tau at the drafted tokens, compares, reads n on the host, and draws from a/b by `multinomial`.
On CUDA (or in the interpreter) the pass is the tiled kernel, grid (gamma, batch), 1,024 wide; on a
CPU it is the same arithmetic in PyTorch.

Unlike the released code the bonus token of the sigmoid variant comes from the exact softmax, and a
token that both filters removed is refused; both are needed for it to run on filtered logits at all.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Paper:
    """The paper's kernel as a function of (ids, draft logits, length, target logits).

    `sigmoid` replaces softmax by sigmoid((z - alpha) / (beta - alpha)): lossy.

    `half` computes that in float16, as the paper's runs with Whisper did. Bounds of +-1e5 are
    infinite there (float16 ends at 65,504) and p^ is no number: no draft is accepted, and the
    residual of zeros, which the released code clamps at 1e-5 before it samples, is uniform. That is
    the breakdown of tables 2 and 7.
    """

    sigmoid: bool = False
    alpha: float = -1e4
    beta: float = 1e4
    half: bool = False

    @property
    def exact(self) -> bool:
        """Whether it keeps the target's law."""
        return not self.sigmoid

    @property
    def name(self) -> str:
        """For tables."""
        return "paper sigmoid" if self.sigmoid else "paper exact"

    def __call__(
        self,
        candidate_input_ids: Tensor,
        candidate_logits: Tensor,
        candidate_length: int,
        new_logits: Tensor,
        assistant_ensemble_weight: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Valid tokens [1, n + 1] and n."""
        gamma = candidate_logits.shape[1]
        drafted = candidate_input_ids[:, -candidate_length:]
        ratio, rest, mass, target = self.tables(candidate_logits, new_logits)
        tau = ratio.gather(2, drafted[..., None])[0, :, 0]
        accepted = torch.rand_like(tau) <= tau
        n = ((~accepted).cumsum(-1) < 1).sum()
        if n < gamma and mass[0, n] > 0:
            law = rest[:, n] / mass[:, n, None]
        elif n < gamma and self.half and self.sigmoid:
            law = torch.ones_like(target[:, n])
        else:
            law = target[:, n]
        following = torch.multinomial(law, 1)
        return torch.cat([drafted[:, :n], following], -1), n

    def tables(
        self, candidate_logits: Tensor, new_logits: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """tau [B, gamma, V], a [B, gamma, V], b [B, gamma] and the law of the bonus row."""
        gamma = candidate_logits.shape[1]
        if self.sigmoid:
            p, q = new_logits, candidate_logits
            law = torch.zeros_like(p)
            law[:, gamma] = p[:, gamma].softmax(-1)
            law[:, :gamma] = law[:, gamma:]  # only for a residual without mass
        else:
            p, q = new_logits.softmax(-1), candidate_logits.softmax(-1)
            law = p
        if not self.half and (p.device.type == "cuda" or _interpreted()):
            return (*self._kernel(p.contiguous(), q.contiguous()), law)
        p = p[:, :gamma]
        if self.sigmoid:
            p, q = self._squash(p), self._squash(q)
        tau = torch.where(q > 0, (p / q).clamp(max=1), 0.0)
        rest = (p - q).nan_to_num(0.0).clamp(min=0)
        return tau, rest, rest.sum(-1), law

    def _squash(self, z: Tensor) -> Tensor:
        if not self.half:
            return _squashed(z, self.alpha, self.beta)
        z = z.half()
        return _squashed(z, z.new_tensor(self.alpha), z.new_tensor(self.beta)).float()

    def _kernel(self, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        from outrider_lab.baselines.kernels import paper_tile

        batch, gamma, vocab = q.shape
        ratio, rest = torch.zeros_like(q), torch.zeros_like(q)
        mass = torch.empty(batch, gamma, dtype=torch.float32, device=q.device)
        paper_tile[gamma, batch](
            p, q, ratio, rest, mass, vocab, self.alpha, self.beta, TILE=1024, SIGMOID=self.sigmoid,
            num_warps=32,
        )  # fmt: skip
        if q.device.type == "cuda":
            torch.cuda.synchronize(q.device)  # as the paper's code does
        return ratio, rest, mass


def _squashed(z: Tensor, alpha: float | Tensor, beta: float | Tensor) -> Tensor:
    s = torch.sigmoid((z - alpha) / (beta - alpha))
    return torch.where(z < alpha, 0.0, torch.where(z > beta, 1.0, s))


def _interpreted() -> bool:
    from outrider.ops import chosen

    return chosen(torch.device("cpu")) == "triton"


PAPER_EXACT = Paper()
PAPER_SIGMOID = Paper(sigmoid=True)
