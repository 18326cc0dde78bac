"""Data sets, few-shot episodes and splits over clients; each module stands alone."""
