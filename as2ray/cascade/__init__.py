"""What dropping candidates between exits means and costs. Numbers only: must not import models."""
