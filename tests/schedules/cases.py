"""Any schedule of any legal sizes, for tests of what holds for all of them."""

from hypothesis import strategies as st

from megajax.schedules.registry import SPECS, make_schedule

ONE_CHUNK = ("gpipe", "1f1b", "eager_1f1b", "zb_h1", "zb_h2")
TWO_CHUNKS = ("zb_v", "dualpipe_v")
ANY_CHUNKS = ("interleaved_1f1b", "looped_bfs", "zb_1p_interleaved")
NAMED = (*ONE_CHUNK, *TWO_CHUNKS, *ANY_CHUNKS)
assert {*NAMED, "auto", "forward_only", "pipedream_2bw"} == set(SPECS)


@st.composite
def named_schedules(draw, most_stages=6):
    """A named schedule with p up to `most_stages`, v up to 4, and m up to about 3p, whatever of it is legal."""
    name, stages = draw(st.sampled_from(NAMED)), draw(st.integers(1, most_stages))
    chunks = 2 if name in TWO_CHUNKS else draw(st.integers(1, 4)) if name in ANY_CHUNKS else 1
    microbatches = draw(st.integers(1, 3 * stages + 1))
    options = {}
    if name == "dualpipe_v":
        microbatches += 2 * stages
    if name in ("interleaved_1f1b", "zb_1p_interleaved"):
        microbatches *= stages
    if name == "interleaved_1f1b" and draw(st.booleans()):
        options["group_size"] = draw(st.integers(stages, microbatches))
        rest = microbatches % options["group_size"]
        microbatches += stages - rest if 0 < rest < stages else 0
    return make_schedule(name, stages=stages, microbatches=microbatches, chunks=chunks, **options)
