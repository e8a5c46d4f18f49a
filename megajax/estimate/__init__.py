"""What a run costs on paper, and what a compiled program costs: FLOPs, memory, communication, time."""
