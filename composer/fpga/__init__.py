"""FPGAs that need not be here: a model of the pipelines, and what compilers report of their designs."""
