"""The rates of `megajax.estimate.rates` against published throughputs of other programs, for which there is a model here."""
