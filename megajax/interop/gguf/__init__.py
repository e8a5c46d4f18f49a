"""GGUF files (llama.cpp's) in, as if they were Hugging Face's directories."""
