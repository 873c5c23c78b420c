"""Long Range Arena: data, an encoder that takes any mixer, and a trainer.

Needs the extra ``fastattn[lra]``. Lightning is imported only when training starts; tasks, data and
the encoder work without it. The command is ``fastattn-lra``.
"""
