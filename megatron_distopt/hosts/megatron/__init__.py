"""What the Megatrons of all generations share."""
