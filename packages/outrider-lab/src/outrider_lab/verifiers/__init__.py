"""Rules that exist to be compared; entry points of the group `outrider.verifiers` name them."""
