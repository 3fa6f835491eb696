"""How the shipped corrector is made: a small T5 that maps damaged Python to the code meant."""
