"""Commands about runs, files and machines; they take flags."""
