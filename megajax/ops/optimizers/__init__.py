"""Optimizers: what a function that makes one is given, those that are built in, and stacked layers."""
