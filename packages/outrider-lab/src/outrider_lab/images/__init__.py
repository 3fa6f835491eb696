"""Pictures as tokens: `outrider bench images`, on scikit-learn's digits.

digits      pictures as tokens, and back
training    the target and the draft, trained in minutes and kept in the cache
experiment  pictures of the target and of speculative decoding, and whether their laws differ
picture     both side by side, and where drafted pixels were kept
"""
