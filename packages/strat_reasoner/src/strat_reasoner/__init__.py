"""Strat-Reasoner: reinforcement learning of recursive reasoning in multi-agent games."""
