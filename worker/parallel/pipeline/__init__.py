"""Pipeline parallelism: ranks hold stages of a model. `parallel.py` describes the parts."""
