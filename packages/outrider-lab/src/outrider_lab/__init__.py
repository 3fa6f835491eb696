"""The papers' experiments, tasks by kind of text, and the book that gathers what they found."""
