"""Weights and configurations of other tools: Hugging Face's directories in and out, GGUF files in."""
