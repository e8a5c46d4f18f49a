"""Hypothesis strategy for any registered schedule of any legal sizes, for tests of properties that hold for all."""

from hypothesis import strategies as st

from megajax.schedules.registry import find, make_schedule, names

# The table of a schedule that never drains is not valid by itself; `auto` makes tables of the others.
NAMED = tuple(name for name in names() if find(name).drains and name != "auto")
assert len(NAMED) >= 10


@st.composite
def named_schedules(draw, most_stages=6):
    """A schedule with p up to `most_stages`, v up to 4, and m up to about 3p where that is legal."""
    name, stages = draw(st.sampled_from(NAMED)), draw(st.integers(1, most_stages))
    spec = find(name)
    chunks = {"one": st.just(1), "two": st.just(2), "even": st.sampled_from([2, 4]), "any": st.integers(1, 4)}[
        spec.chunks
    ]
    microbatches = draw(st.integers(1, 3 * stages + 1))
    if spec.fewest_microbatches(stages) > 1:
        microbatches += spec.fewest_microbatches(stages)
    if spec.rounds:
        microbatches *= stages
    options = {}
    if "group_size" in spec.options and draw(st.booleans()):
        options["group_size"] = draw(st.integers(stages, microbatches))
        rest = microbatches % options["group_size"]
        microbatches += stages - rest if 0 < rest < stages else 0
    return make_schedule(name, stages=stages, microbatches=microbatches, chunks=draw(chunks), **options)
