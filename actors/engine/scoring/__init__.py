"""Log-probabilities of given continuations of prompts, by prefill alone."""
