"""What a run costs on paper: floating-point operations, and what the hardware can do."""
