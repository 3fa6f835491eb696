"""How the shipped pair is made: corpus, tokenizer, target, draft, evaluation, export."""
