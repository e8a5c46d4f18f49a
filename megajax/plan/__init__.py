"""Planning: a search over layouts (`python -m megajax.plan`) and a compile-only dry run (`megajax.plan.dryrun`)."""
