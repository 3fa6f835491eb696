"""Inside vLLM: our drafters for its `custom_class`, our rules in place of its rejection sampling.

proposer  drafters that need no model
patch     a rule instead of vLLM's own, by one call or by OUTRIDER_VLLM_RULE: what it is told, and
          what vLLM is told by it

Importing this imports nothing of vLLM.
"""

from outrider_vllm.patch import use_verifier
from outrider_vllm.proposer import Proposer

__all__ = ["Proposer", "use_verifier"]
