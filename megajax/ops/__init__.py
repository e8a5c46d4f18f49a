"""What models compute with: attention, matmuls, the token tables; with their communication."""
