"""Long runs, whose processes and files are watched for growth."""
