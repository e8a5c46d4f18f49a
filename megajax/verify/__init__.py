"""Compares the training steps of two layouts or versions, and names the first tensor that differs beyond rounding."""
