"""How a job's own rows make its checkpoint fast: sample, answer, tune, evaluate, choose a speed.

May import every package but cli.
"""
