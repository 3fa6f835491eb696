"""Text at the edges: prompts, tokenizers, and what users hold."""
