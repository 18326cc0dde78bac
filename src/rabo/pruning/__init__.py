"""Cut a model to the submodel that fits a client."""
