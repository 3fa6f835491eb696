"""What commands measure with: timed comparisons, intervals, prompts, rates, pictures."""
