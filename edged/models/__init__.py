"""Hyper-parameters and the forward, written once."""
