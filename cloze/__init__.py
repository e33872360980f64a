"""The package of the command line, the client, and the stages; it imports none of them."""

import os

# The official builds of onnxruntime write an identity to the home folder and send telemetry from
# their import on, unless this variable is set. Every process imports this package before them.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
