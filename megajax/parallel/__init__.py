"""How arrays lie on the mesh: axis rules, sequence parallelism, and the vocabulary split over tensor."""
