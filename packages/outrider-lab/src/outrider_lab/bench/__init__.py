"""What experiments measure with: timed comparisons, intervals, prompts, rates."""
