"""What is recorded, and by whom: the registry first, MLflow as its mirror."""
