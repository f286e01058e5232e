"""Views of the records of recall."""

from efficient_attn.studies.recall.plot import plots as plots
from efficient_attn.studies.recall.tables import sentences as sentences
from efficient_attn.studies.recall.tables import tables as tables
