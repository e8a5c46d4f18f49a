"""Pipeline schedules as plain data, without jax: generated, validated, simulated, drawn, read and written.

Importing this package registers the schedules that megajax has, in the order in which `registry.names()` lists them.
"""

# isort: off
from megajax.schedules import gpipe as gpipe
from megajax.schedules import one_f_one_b as one_f_one_b
from megajax.schedules import interleaved as interleaved
from megajax.schedules import zero_bubble as zero_bubble
from megajax.schedules import dualpipe as dualpipe
from megajax.schedules import greedy as greedy
from megajax.schedules import waves as waves
