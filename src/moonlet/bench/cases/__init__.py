"""What every operator is measured and checked on: one builder per operator."""
