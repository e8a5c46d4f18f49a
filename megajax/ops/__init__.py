"""Operations of models and their communication: attention, matmuls, token tables."""
