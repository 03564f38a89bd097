"""The policy's network: one loader, one forward, used by the trainer and by the local engine alike."""

import logging

# What it asks for at every start serves only a layout of 4-bit weights that has no gradient.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
