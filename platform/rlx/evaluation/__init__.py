"""What a trained model can do: accuracy, calibration, and their pictures."""
