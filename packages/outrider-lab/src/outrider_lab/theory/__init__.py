"""Acceptance calculators: closed forms, bounds and prices, in float64.

    node       how often each rule follows a draft at one node
    transport  the most any exact rule could (optimal transport)
    length     tokens per call, speed, memory and operations from an acceptance
    chains     tokens per call of any rule on a chain, by enumeration
    price      how far a lossy rule's tokens are from the target's law
    capacity   seconds of a step on a machine; rows from which speculation stops paying

Nothing here is used while decoding; docs/theory.md has the formulas with their assumptions.
"""

from outrider_lab.theory import capacity, chains, length, node, price, transport

__all__ = ["capacity", "chains", "length", "node", "price", "transport"]
