"""Turn a model and its optimizer into those of a level, with the options that save memory."""
