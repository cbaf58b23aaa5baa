"""The parts of quickstart.py: a GPT that reads and writes bytes. In reading order: settings,
choose, data, model, trainer, records, train, measure, memory, progress, sample, report, plot."""

import warnings

# At import megatron-core warns that apex and TransformerEngine are missing: here they are meant to
# be. On a new torch it also calls collectives by names that torch is about to retire, on every
# rank.
warnings.filterwarnings("ignore", module=r"megatron\..*|torch\.distributed\..*")
