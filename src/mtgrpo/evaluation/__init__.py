"""What an evaluation may claim: statistics and findings."""
