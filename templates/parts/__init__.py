"""What templates share: device operations, epilogues, the sizes of machines."""
